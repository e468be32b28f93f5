"""One table trained by several workers of `tf.distribute.MultiWorkerMirroredStrategy`; `table` says what holds."""
