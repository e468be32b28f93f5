"""What is trained: tables of users and items, and a head that turns their rows into scores and losses."""
