"""What all formats share: rows of a file and of a table, words as names of rows, reading ahead."""
