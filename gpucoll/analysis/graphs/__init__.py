"""Graphs of links: the best bandwidth that any algorithm can reach, and an algorithm that reaches it.

    link_graph     ranks, switches and links, from a TOML file
    named          machines and regular networks by name
    max_flow       maximum flow and minimum cut
    bounds         the largest algbw of a collective, exactly, with the cut that limits it
    symmetry       rotations of the rank numbers, and trees that are turned
    switches       switches replaced by direct links between ranks
    tree_packing   spanning trees that fill the links
    synthesis      an algorithm made of trees: `gpucoll synthesize`
    link_order     the messages of trees in the order of links, in place of a pipeline
    automorphisms  symmetries of a graph
    step_search    an algorithm of given steps, rounds and chunks, or a proof that none exists
    few_steps      the point with the least predicted time
"""
