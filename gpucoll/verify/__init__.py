"""Proofs: what all ranks of a schedule do together, and the proof of a user's schedule before its first use.

    symbolic  all ranks run together, on sets of contributions
    user      algorithms of the user's own
"""
