"""What all layers on one table share: the table, its token and kept epoch, and its lookups as TensorFlow ops."""
