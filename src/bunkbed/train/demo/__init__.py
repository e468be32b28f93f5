"""`bunkbed demo`: made-up interactions, the same training with little RAM and with enough, and a picture of both."""
