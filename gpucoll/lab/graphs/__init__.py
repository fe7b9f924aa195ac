"""Graphs of links: the best bandwidth of any algorithm, and algorithms that reach it.

    link_graph     ranks, switches and links, from a TOML file
    named          machines and regular networks by name
    max_flow       maximum flow and minimum cut
    bounds         the largest algbw of a collective as an exact fraction, with the limiting cut
    symmetry       permutations of the nodes that keep the links, and trees rotated by them
    switches       switches replaced by direct links between ranks
    tree_packing   spanning trees that fill the links
    synthesis      an algorithm made of trees: `gpucoll synthesize`
    link_order     messages without trees: in each round every link sends pieces that its receiver lacks
"""
