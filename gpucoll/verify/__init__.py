"""Proofs that a schedule is right on all ranks together; a user's algorithm is proved before the first use.

    symbolic  runs all ranks on symbols for chunks, and counts contributions
    user      checks, proves and prices algorithms written by users
"""
