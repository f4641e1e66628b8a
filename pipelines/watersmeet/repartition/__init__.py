"""Repartition: writes a source's records to the topic that bronze reads.

They come from topics with any key and any number of partitions. They are written in the order and
to the partitions of `core.repartition`, each once, by one transactional producer. The topic itself
says how much is written: in a transaction, the last message of each partition says up to which
offset of every input (a partition of a topic that is read) the records were written. The message
with the largest offsets is the latest. For each source (`command`):

1. its rules are compared with the lake's, if there is a lake. An earlier repartition
   is fenced and its open transaction aborted, so that from here on nobody else writes. While
   `evolve` changes the lake's rules, nothing is written at all, and `evolve` fences a repartition
   that began before it;
2. *recovery*: what was written is read from the last messages (`topics`);
3. *read*: the next records are read from the inputs that have no waiting records. This begins
   while the previous records are written;
4. *transaction*: the records that may be written are sent, all of them or none.

After a crash, or any other failure, everything starts again with step 1. Of the lake, only the
rules are read.
"""
