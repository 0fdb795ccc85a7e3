class DelayedScaling:
    def __init__(self, margin=0, interval=1):
        self.margin = margin
        self.interval = interval
