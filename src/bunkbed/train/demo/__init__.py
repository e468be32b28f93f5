"""`bunkbed demo`: synthetic interactions, the same training with little RAM and with enough, and a plot of both."""
