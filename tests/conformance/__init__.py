"""The life of a request, the same for every dialect and transport: each case here runs for each way in.

    ways.py, h2_ways.py, rpc_ways.py   a way in: a dialect, a transport, how tensors travel
    models.py                          one model in every form there is, each with its fast path and without
    scenarios.py                       what happens to requests: a table, played for each way (test_scenarios)
    books.py                           what must have been counted of it, the same for every dialect
    steps.py                           the steps of a request's life, each made to fail (test_failures)
    test_equal, test_leaving, test_reload   both paths answer alike; clients leave; versions end
    rig.py                             the one server of all of it, in the tests' own loop

A new dialect joins by a way (docs/writing-a-dialect.md says what that takes). Nothing else here knows
dialects, but for the functions that `steps.py` wraps to have writing fail on the general path.
"""
