"""Side features of users and items: reading them from a file, and storing them with a run's interactions."""
