"""Engines with one fault in them, as it was seen in the wild: the harness is worth what it says of these.

A control is a small file in one of the rooms here, with a subclass of `loop.Loop` that overrides what it gets wrong.
"""
