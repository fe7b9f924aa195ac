"""NCCL's choice of algorithm and protocol: NCCL's tuning model, and the measured times of nccl-tests.

`releases` has the constants of each release, `tuning` the model, `machines` named machines and machines from NCCL's
logs, `measurements` the times printed by nccl-tests, and the file for NCCL's example tuner.
"""
