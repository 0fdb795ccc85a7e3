from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_strategies():
    return [Component("twin", "acme_twin_a.part:Part"), Component("only_a", "acme_twin_a.part:Part")]
