"""The JVM: which Java there is, and the pinned artifacts of Spark and of the embedded broker."""
