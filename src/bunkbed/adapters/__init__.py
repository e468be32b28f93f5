"""Code that the layers of torch and Keras share; no framework is imported here."""
