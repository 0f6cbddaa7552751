"""The tools that check an implementation against the specification, step by step.

PYTEST_DONT_REWRITE.
"""
