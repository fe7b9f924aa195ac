"""Proofs that a schedule is correct for all ranks together. A user's algorithm is proved before its first use.

    symbolic  runs all ranks on symbolic chunks, and counts contributions
    user      checks and proves users' algorithms, and predicts their times
"""
