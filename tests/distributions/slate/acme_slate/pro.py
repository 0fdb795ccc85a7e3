import no_such_vendor_sdk

from acme_slate.accelerator import SlateAccelerator


class ProAccelerator(SlateAccelerator):
    driver = no_such_vendor_sdk
