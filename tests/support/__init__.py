"""Shared by tests of several folders: running parts with a real server behind them, and operations on them.

Nothing here asserts for a test: these modules start parts, publish, and report the output.
"""
