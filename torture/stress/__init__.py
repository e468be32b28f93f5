"""Threads and reader processes that call everything at once, and an oracle of what each row may show."""
