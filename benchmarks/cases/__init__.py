"""Cases of the suite, one subject to a file; several are commands of their own, with more options."""
