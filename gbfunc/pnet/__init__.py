"""The p-net: its parts (`describe`), and the p-net as a pure function (`pure`)."""
