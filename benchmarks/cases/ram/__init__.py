"""Steps and lookups on a table that is in RAM as a whole."""
