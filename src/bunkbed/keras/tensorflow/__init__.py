"""Keras on TensorFlow: Python called from graphs, and ids in graphs."""
