"""Through the gate goes one query that reads tables and views of the lake, and nothing else."""

from __future__ import annotations

import pytest

from watersmeet.ask.gate import pass_query
from watersmeet.errors import ConfigurationError

TABLES = ["silver", "merged", "late", "bronze_orders"]
DIALECTS = ["datafusion", "spark"]
FUNCTIONS = frozenset(["count", "nullif", "hash"])

READS = {
    "SELECT 1": [],
    "select status, count(*) from silver group by 1;": ["silver"],
    "select * from silver; -- the end": ["silver"],
    "/* all */ select * from silver": ["silver"],
    "WITH late AS (SELECT 1 AS a) SELECT * FROM late": ["late"],
    "WITH own AS (SELECT * FROM merged) SELECT * FROM own JOIN late USING (partition)": [
        "merged",
        "late",
    ],
    "SELECT b.offset FROM bronze_orders b WHERE b.offset IN (SELECT l.offset FROM late l)": [
        "bronze_orders",
        "late",
    ],
    "WITH a AS (SELECT * FROM late), b AS (SELECT * FROM a) SELECT * FROM b, a": ["late"],
    "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n) SELECT * FROM n": [],
    "WITH a AS (SELECT 1) SELECT * FROM (SELECT * FROM a WHERE 1 IN (SELECT * FROM a)) AS x": [],
    "SELECT 1 UNION ALL SELECT 2 ORDER BY 1": [],
    "VALUES (1), (2)": [],
    "SELECT ';', 'drop table silver'": [],
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("text", READS)
def test_a_query_passes_with_the_tables_that_it_reads(text: str, dialect: str) -> None:
    passed = pass_query(text, TABLES, dialect, None)
    assert sorted(passed.names) == sorted(READS[text])
    assert text.startswith(passed.text)
    assert not passed.text.endswith(";")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", ";", "-- nothing"),
        *("CREATE TABLE x (a int)", "CREATE VIEW v AS SELECT 1", "DROP TABLE silver"),
        *("CREATE EXTERNAL TABLE e STORED AS CSV LOCATION '/etc/passwd'", "TRUNCATE TABLE silver"),
        *("INSERT INTO silver SELECT 1", "DELETE FROM silver", "UPDATE silver SET batch = 1"),
        "MERGE INTO silver USING late ON true WHEN MATCHED THEN DELETE",
        *("COPY (SELECT 1) TO '/tmp/x.csv'", "SET x = 1", "RESET x", "USE other", "SHOW TABLES"),
        *("EXPLAIN SELECT 1", "EXPLAIN ANALYZE SELECT 1", "DESCRIBE silver", "VACUUM silver"),
        *("OPTIMIZE silver", "CALL x()", "ADD JAR 'x'", "CACHE TABLE silver", "EXECUTE x"),
        *("SELECT 1; SELECT 2", "SELECT 1; DROP TABLE silver", "DROP TABLE silver; SELECT 1"),
        "WITH x AS (DELETE FROM silver RETURNING *) SELECT * FROM x",
        "WITH x AS (INSERT INTO silver SELECT 1) SELECT * FROM x",
        "SELECT 1 AS a INTO x",
        *("SELECT * FROM nosuch", "SELECT * FROM other.silver", "SELECT * FROM a.b.silver"),
        "SELECT * FROM information_schema.tables",
        "WITH a AS (SELECT * FROM b), b AS (SELECT 1) SELECT * FROM a",
        "SELECT * FROM (WITH a AS (SELECT 1) SELECT * FROM a) AS x JOIN a ON true",
        "WITH a AS (WITH b AS (SELECT 1) SELECT * FROM b) SELECT * FROM a, b",
        *("SELECT * FROM silver WHERE (1", "SELECT 'a", "SELEC 1", "/* open"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(text: str, dialect: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        pass_query(text, TABLES, dialect, None)
    assert refused.value.problem.where.startswith("QUERY")
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        *("SELECT reflect('java.lang.System', 'exit', 1)", "SELECT java_method('a', 'b')"),
        *("SELECT own_function(1)", "SELECT `own_function`(1)", "SELECT other.own_function(1)"),
        *("SELECT * FROM read_files('/etc')", "SELECT ai_query('a', 'b')", "SELECT secret('a')"),
        *("SELECT * FROM csv.`/etc/passwd`", "SELECT * FROM delta.`s3://bucket/table`"),
        *("SELECT (TABLE other)", "WITH a AS (TABLE other) SELECT * FROM a"),
        *("SELECT TRANSFORM (partition) USING 'cat' FROM silver", "SELECT '${env:HOME}'"),
    ],
)
def test_what_reaches_outside_of_spark_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        pass_query(text, TABLES, "spark", FUNCTIONS)


def test_functions_of_the_engine_pass() -> None:
    pass_query(
        "SELECT count(*), hash(1), nullif(a, 1), left('ab', 1) FROM silver",
        TABLES,
        "spark",
        FUNCTIONS,
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("SELECT *\nFROM silverr", "line 2, column 6"),
        ("SELECT a b c FROM silver", "line 1, column 12"),
        ("SELECT a,\n  b\n  c d FROM silver", "line 3, column 5"),
        ("SELECT 1;\nDROP TABLE silver", "line 1, column 9"),
        ("  DROP TABLE silver", "line 1, column 3"),
        ("SELECT *\n  FROM a.b", "line 2, column 8"),
    ],
)
def test_the_sentence_points_into_the_query(text: str, place: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        pass_query(text, TABLES, "datafusion", None)
    assert refused.value.problem.where == f"QUERY, {place}"


def test_a_name_that_is_nearly_a_table_is_told() -> None:
    with pytest.raises(ConfigurationError, match="did you mean `silver`"):
        pass_query("SELECT * FROM silverr", TABLES, "datafusion", None)
