"""Data sets in shards: tar files of some hundred megabytes, in the layout of WebDataset, with an index beside them.

    shards.json           classes, and of every split its shards: file, records, bytes, SHA-256
    train.index.npy       one row a record: place in its shard, label, checksum (`index.RECORD`)
    train.names           names of the records, UTF-8, end to end
    train-000000.tar …    NUMBER.jpg, NUMBER.cls (the label), NUMBER.json (name and class), record after record

The index makes any record one read at an offset, so shards are a source like every other. It is memory-mapped: a record
costs no Python object. Shards of other programs have no index; `scan` makes one from their headers.
"""
