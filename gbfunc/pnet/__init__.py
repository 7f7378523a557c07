"""The p-net: its parameters and buffers (`describe`), and the p-net as a pure function (`pure`)."""
