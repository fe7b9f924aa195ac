"""The way of a call: what the arguments ask for, the compiled call, and the table of the calls known already.

    table       find a known call, or prepare, compile and keep a new one; run it at once or behind a `Work`
    compile     a request: executor, algorithm, plan, compiled call

The checks of arrays and their flat rows, the first step, are in `gpucoll.arrays`: executors need them too.
"""
