"""What all cases share: the list of them, sides in turns, figures and their report."""
