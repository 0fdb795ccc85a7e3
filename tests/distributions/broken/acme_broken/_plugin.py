from no_such_vendor_sdk import driver  # at discovery, where it must not be

DRIVER = driver
