"""Engines with one fault in them, as it was seen in the wild: the harness is worth what it says of these."""
