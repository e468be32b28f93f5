"""What all cases share: their list, sides in turns, figures and their report."""
