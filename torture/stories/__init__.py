"""Stories in which features of a table meet: every pair, and every call between two steps of a walk over rows."""
