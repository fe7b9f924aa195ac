"""The vocabulary: schedules, chunks, ops, dtypes, the collectives, trees and grids of ranks, signatures of calls."""
