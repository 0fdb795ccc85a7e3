from bagua.torch_api.data_parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
