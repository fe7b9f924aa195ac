"""What a run's records look like to people: curves, pictures, tables, and the page that holds them.

```
      ../report.py    ../plot.py           what people call
             layout.py                     one HTML page
    tables.py  facts.py  charts.py  heatmap.py   numbers; pictures
        curves.py    canvas.py             what a record says; shapes and colours
```
Below stands `../summary.py` for what is computed from times, and `gpucoll.analysis.document` for what these files have
in common with those of `gpucoll draw` and `gpucoll simulate`; neither MPI nor matplotlib is imported.
"""
