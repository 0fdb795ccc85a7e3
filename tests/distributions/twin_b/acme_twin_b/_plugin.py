from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_strategies():
    return [Component("twin", "acme_twin_b.part:Part"), Component("only_b", "acme_twin_b.part:Part")]
