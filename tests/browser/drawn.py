"""The page of a drawing in the browser: questions to its script, and how it is shown."""


LAST = "Number(document.getElementById('scrub').max)"

FRAME = "Number(document.documentElement.dataset.frame)"

COMPLETE = "nodes.map((node) => [Number(node.dataset.complete), Number(node.dataset.of)])"

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def show(browser, path, width=1280):
    """Load a page for a reader without motion, so that a step is done at once."""
    browser.show(path, width)
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
