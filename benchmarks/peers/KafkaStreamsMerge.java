import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListOffsetsResult.ListOffsetsResultInfo;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.Serializer;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.AutoOffsetReset;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.processor.PunctuationType;
import org.apache.kafka.streams.processor.StreamPartitioner;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.processor.api.RecordMetadata;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.StoreBuilder;
import org.apache.kafka.streams.state.Stores;

/**
 * The merge as a Kafka Streams program: a processor over both topics, its state in RocksDB with a
 * changelog topic, exactly once (v2).
 *
 * <p>{@code java -cp JARS KafkaStreamsMerge.java BOOTSTRAP FOLDER PARTITIONS [TIMEOUT_MS]}. Without a
 * timeout it runs over everything that the topics hold, and ends; with one, it runs on and on, and
 * commits ten times a second, as Kafka Streams does by default.
 *
 * <p>A task reads a partition of both topics, the smaller event time first as far as both are there
 * (max.task.idle.ms), and its stream time is the largest event time seen. A record joins the open merge
 * record of its key if that began no longer than the timeout before the stream time; one that is more
 * than the timeout behind is late, counted and dropped. What timed out is published once, in order of
 * event time.
 */
public final class KafkaStreamsMerge {
  private static final List<String> TOPICS = List.of("tracking", "orders");
  private static final String SINK = "merged_by_kafka_streams";
  private static final String OPEN = "open";
  private static final String DUE = "due";
  private static final long TIMEOUT_MS = 600_000;
  private static final JsonFactory JSON = new JsonFactory();
  private static final AtomicLong LATE = new AtomicLong();

  /** A record of a topic; a heartbeat has no key. */
  private record Event(byte[] key, long eventTime, byte[] value) {}

  /** A part of a merge record: {@code topic} is its place in TOPICS. */
  private record Part(long eventTime, long offset, byte topic, byte[] value) {}

  /** A message of the sink, and the partition that it belongs to. */
  private record Message(int partition, byte[] value) {}

  public static void main(String[] arguments) throws Exception {
    String servers = arguments[0];
    int partitions = Integer.parseInt(arguments[2]);
    boolean runsOn = arguments.length > 3;
    long timeout = runsOn ? Long.parseLong(arguments[3]) : TIMEOUT_MS;
    Map<TopicPartition, Long> ends = new ConcurrentHashMap<>();
    if (!runsOn) {
      ends.putAll(ends(servers, partitions));
    }
    CountDownLatch isOver = new CountDownLatch(runsOn ? 1 : ends.size());
    Properties settings = settings(servers, arguments[1], partitions, runsOn);
    KafkaStreams streams = new KafkaStreams(topology(timeout, ends, isOver), settings);
    streams.setUncaughtExceptionHandler(
        error -> {
          error.printStackTrace();
          Runtime.getRuntime().halt(1);
          return null;
        });
    CountDownLatch isClosed = new CountDownLatch(1);
    if (runsOn) {
      Thread end =
          new Thread(
              () -> {
                isOver.countDown();
                try {
                  isClosed.await();
                } catch (InterruptedException error) {
                  return;
                }
                Runtime.getRuntime().halt(0); // else the SIGTERM would be its status
              });
      Runtime.getRuntime().addShutdownHook(end);
    }
    streams.start();
    if (runsOn) {
      System.out.println("runs on and on");
    }
    isOver.await();
    streams.close(); // commits what was read and written
    System.out.println(LATE.get() + " late");
    System.out.flush();
    isClosed.countDown();
  }

  private static Map<TopicPartition, Long> ends(String servers, int partitions) throws Exception {
    Map<TopicPartition, OffsetSpec> asked = new ConcurrentHashMap<>();
    for (String topic : TOPICS) {
      for (int partition = 0; partition < partitions; partition++) {
        asked.put(new TopicPartition(topic, partition), OffsetSpec.latest());
      }
    }
    Map<TopicPartition, Long> found = new ConcurrentHashMap<>();
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", servers))) {
      for (Map.Entry<TopicPartition, ListOffsetsResultInfo> end :
          admin.listOffsets(asked).all().get().entrySet()) {
        found.put(end.getKey(), end.getValue().offset());
      }
    }
    return found;
  }

  private static Properties settings(
      String servers, String folder, int partitions, boolean runsOn) {
    int cores = Runtime.getRuntime().availableProcessors();
    Properties settings = new Properties();
    settings.put(StreamsConfig.APPLICATION_ID_CONFIG, "kafka_streams-" + ProcessHandle.current().pid());
    settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, servers);
    settings.put(StreamsConfig.STATE_DIR_CONFIG, folder + "/state");
    settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
    settings.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
    settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, Math.min(cores, partitions));
    // What changes between two commits is written once.
    settings.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 256L << 20);
    settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, runsOn ? 100 : 5_000);
    settings.put(StreamsConfig.BUFFERED_RECORDS_PER_PARTITION_CONFIG, 5_000);
    settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.MAX_POLL_RECORDS_CONFIG), 5_000);
    settings.put(StreamsConfig.producerPrefix(ProducerConfig.BATCH_SIZE_CONFIG), 256 << 10);
    return settings;
  }

  private static Topology topology(
      long timeout, Map<TopicPartition, Long> ends, CountDownLatch isOver) {
    Topology topology = new Topology();
    topology.addSource(
        AutoOffsetReset.earliest(),
        "records",
        (record, partitionTime) -> ((Event) record.value()).eventTime(),
        new ByteArrayDeserializer(),
        (Deserializer<Event>) (topic, value) -> parsed(value),
        TOPICS.toArray(new String[0]));
    topology.addProcessor("merge", () -> new Merge(timeout, ends, isOver), "records");
    topology.addStateStore(store(OPEN), "merge");
    topology.addStateStore(store(DUE), "merge");
    topology.addSink(
        "sink",
        SINK,
        new ByteArraySerializer(),
        (Serializer<Message>) (topic, message) -> message.value(),
        (StreamPartitioner<byte[], Message>)
            new StreamPartitioner<byte[], Message>() {
              @Override
              public Optional<Set<Integer>> partitions(
                  String topic, byte[] key, Message message, int count) {
                return Optional.of(Set.of(message.partition()));
              }
            },
        "merge");
    return topology;
  }

  private static StoreBuilder<KeyValueStore<Bytes, byte[]>> store(String name) {
    return Stores.keyValueStoreBuilder(
            Stores.persistentKeyValueStore(name), Serdes.Bytes(), Serdes.ByteArray())
        .withCachingEnabled();
  }

  private static Event parsed(byte[] value) {
    byte[] key = null;
    long eventTime = -1;
    try (JsonParser parser = JSON.createParser(value)) {
      parser.nextToken();
      while (parser.nextToken() == JsonToken.FIELD_NAME) {
        String name = parser.currentName();
        parser.nextToken();
        if (name.equals("ssid")) {
          key = parser.getText().getBytes(StandardCharsets.UTF_8);
        } else if (name.equals("ts")) {
          eventTime = parser.getLongValue();
        } else {
          parser.skipChildren();
        }
      }
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
    return new Event(key, eventTime, value);
  }

  /** The merge in one partition. */
  private static final class Merge implements Processor<byte[], Event, byte[], Message> {
    private final long timeout;
    private final Map<TopicPartition, Long> ends;
    private final CountDownLatch isOver;
    private ProcessorContext<byte[], Message> context;

    /** By key: event time and last event time, then the parts as they came. */
    private KeyValueStore<Bytes, byte[]> open;

    /** By event time and key: what there is in `open`. */
    private KeyValueStore<Bytes, byte[]> due;

    private long closedUntil = 0;

    Merge(long timeout, Map<TopicPartition, Long> ends, CountDownLatch isOver) {
      this.timeout = timeout;
      this.ends = ends;
      this.isOver = isOver;
    }

    @Override
    public void init(ProcessorContext<byte[], Message> context) {
      this.context = context;
      open = context.getStateStore(OPEN);
      due = context.getStateStore(DUE);
      context.schedule(Duration.ofMillis(100), PunctuationType.STREAM_TIME, at -> closeUntil(at));
    }

    @Override
    public void process(Record<byte[], Event> record) {
      RecordMetadata from = context.recordMetadata().orElseThrow();
      Event event = record.value();
      long now = context.currentStreamTimeMs();
      if (event.key() == null) {
        // A heartbeat has moved the stream time.
      } else if (event.eventTime() < now - timeout) {
        LATE.incrementAndGet();
      } else {
        merge(event, from, now);
      }
      Long end = ends.get(new TopicPartition(from.topic(), from.partition()));
      if (end != null && from.offset() == end - 1) {
        closeUntil(now);
        isOver.countDown();
      }
    }

    private void merge(Event event, RecordMetadata from, long now) {
      Bytes key = Bytes.wrap(event.key());
      byte[] before = open.get(key);
      if (before != null && eventTime(before) < now - timeout) {
        close(key, before);
        before = null;
      }
      long begin = event.eventTime();
      long last = event.eventTime();
      byte[] parts = new byte[0];
      if (before != null) {
        begin = Math.min(begin, eventTime(before));
        last = Math.max(last, ByteBuffer.wrap(before).getLong(8));
      }
      int kept = before == null ? 0 : before.length - 16;
      ByteBuffer after = ByteBuffer.allocate(16 + kept + 21 + event.value().length);
      after.putLong(begin).putLong(last);
      if (before != null) {
        after.put(before, 16, kept);
      }
      after.putLong(event.eventTime()).putLong(from.offset());
      after.put((byte) TOPICS.indexOf(from.topic())).putInt(event.value().length);
      after.put(event.value());
      open.put(key, after.array());
      if (before == null || begin != eventTime(before)) {
        if (before != null) {
          due.delete(dueKey(eventTime(before), key.get()));
        }
        due.put(dueKey(begin, key.get()), new byte[0]);
      }
    }

    /** Publishes whatever began more than the timeout before this stream time. */
    private void closeUntil(long now) {
      if (now - timeout <= closedUntil) {
        return;
      }
      // Nothing on time can have begun before what was closed last.
      Bytes since = dueKey(closedUntil, new byte[0]);
      closedUntil = now - timeout;
      List<Bytes> over = new ArrayList<>();
      try (KeyValueIterator<Bytes, byte[]> found =
          due.range(since, dueKey(closedUntil, new byte[0]))) {
        while (found.hasNext()) {
          KeyValue<Bytes, byte[]> each = found.next();
          byte[] place = each.key.get();
          over.add(Bytes.wrap(Arrays.copyOfRange(place, 8, place.length)));
        }
      }
      for (Bytes key : over) {
        close(key, open.get(key));
      }
    }

    private void close(Bytes key, byte[] merged) {
      open.delete(key);
      due.delete(dueKey(eventTime(merged), key.get()));
      Message message = new Message(context.taskId().partition(), text(key.get(), merged));
      context.forward(new Record<>(key.get(), message, eventTime(merged)));
    }

    private static long eventTime(byte[] merged) {
      return ByteBuffer.wrap(merged).getLong();
    }

    private static Bytes dueKey(long eventTime, byte[] key) {
      return Bytes.wrap(
          ByteBuffer.allocate(8 + key.length).putLong(eventTime).put(key).array());
    }

    private static byte[] text(byte[] key, byte[] merged) {
      ByteBuffer from = ByteBuffer.wrap(merged);
      long begin = from.getLong();
      long last = from.getLong();
      List<Part> parts = new ArrayList<>();
      while (from.hasRemaining()) {
        long eventTime = from.getLong();
        long offset = from.getLong();
        byte topic = from.get();
        byte[] value = new byte[from.getInt()];
        from.get(value);
        parts.add(new Part(eventTime, offset, topic, value));
      }
      parts.sort(Comparator.comparingLong(Part::eventTime).thenComparingLong(Part::offset));
      ByteArrayOutputStream text = new ByteArrayOutputStream(merged.length + 100);
      text.writeBytes("{\"key\":\"".getBytes(StandardCharsets.UTF_8));
      text.writeBytes(key); // the keys of this input need no escape
      String times = "\",\"event_time\":" + begin + ",\"last_event_time\":" + last;
      text.writeBytes(times.getBytes(StandardCharsets.UTF_8));
      for (int topic = 0; topic < TOPICS.size(); topic++) {
        text.writeBytes((",\"" + TOPICS.get(topic) + "\":[").getBytes(StandardCharsets.UTF_8));
        boolean isFirst = true;
        for (Part part : parts) {
          if (part.topic() == topic) {
            if (!isFirst) {
              text.write(',');
            }
            text.writeBytes(part.value());
            isFirst = false;
          }
        }
        text.write(']');
      }
      text.write('}');
      return text.toByteArray();
    }
  }
}
