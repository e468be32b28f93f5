"""One table trained by several workers of `tf.distribute.MultiWorkerMirroredStrategy`; `table` has the rules."""
