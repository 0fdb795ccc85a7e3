from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_accelerators():
    return [
        Component(
            "slate", "acme_slate.accelerator:SlateAccelerator", "A board of one core", {"clock": 3}, aliases=("tablet",)
        ),
        Component(
            "slate_pro", "acme_slate.pro:ProAccelerator", "With a vendor's driver", requires=("no_such_vendor_sdk",)
        ),
    ]
