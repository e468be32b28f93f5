"""One table: looking up, updating, committing; making and opening one."""
