"""What tests of several folders share: a running part with a real server behind it, and what a test does to it.

Nothing here asserts for a test: these modules start things, publish, and tell what came out.
"""
