"""Lives of runs and tables in which every operation can fail, be cut short by a kill, or lose power."""
