"""Shared definitions: schedules, chunks, ops, dtypes, collectives, trees and grids of ranks, signatures of calls."""
