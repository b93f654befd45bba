"""880 elements, one after the other and all at once, through a model that loves batches.

The model sleeps 0.001 * log(n + 1) seconds for a batch of n: 200 elements take 5.3 ms together and
139 ms apart. Run it: python examples/blog_experiment.py
"""

import asyncio
import math
import time

from fastserve import BatchedService, VectorTransformer


class MyModel(VectorTransformer):
    def transform(self, x):
        time.sleep(0.001 * math.log(len(x) + 1))
        return [v * v for v in x]


class MyService(BatchedService):
    def __init__(self, max_batch_size=200, **more):
        super().__init__(max_batch_size=max_batch_size, **more)

    def start(self):
        return super().start(worker_class=MyModel)


async def run_sequential(service, data):
    return [await service.do_one(x) for x in data]


async def run_batched(service, data):
    tasks = [service.do_one(x) for x in data]
    return await asyncio.gather(*tasks)


def main():
    data = list(range(880))
    # 2 ms instead of the default 100: an element on its own waits this long for company.
    service = MyService(timeout_seconds=0.002)
    service.start()
    loop = asyncio.get_event_loop_policy().get_event_loop()

    t0 = time.perf_counter()
    one_by_one = loop.run_until_complete(run_sequential(service, data))
    t1 = time.perf_counter()
    together = loop.run_until_complete(run_batched(service, data))
    t2 = time.perf_counter()
    assert one_by_one == together == [x * x for x in data]
    service.stop()
    print(f"sequential {t1 - t0:.3f} s, batched {t2 - t1:.3f} s, {(t1 - t0) / (t2 - t1):.0f} times faster")


if __name__ == "__main__":
    main()
