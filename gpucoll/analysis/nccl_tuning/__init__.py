"""NCCL's choice of algorithm and protocol: NCCL's tuning model, and the measured times of nccl-tests.

`releases` has the constants of each release, `tuning` the model, `machines` named machines and machines from NCCL's
logs, `measurements` the times that nccl-tests prints, and the file of NCCL's example tuner.
"""
