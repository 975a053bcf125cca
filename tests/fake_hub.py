"""A stand-in for the Hugging Face Hub on the loopback address, with the data sets of the 25 tasks.

Every copy has the layout, format, columns and label type of its data set card, and 36 rows. All of
it is typed here, nothing is read from tasks.json. A text begins with the name of its class; where a
load must not return it, with "dropped" (a filter) or the path of its file (another split)."""

import csv
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

# Table 2 of the paper: 25th and 75th percentile of the text length, in characters; and the names
# that the data gives to its labels, in class order. Data without names gets the obvious ones.
TASKS = {
    "ag_news": (196, 266, "World|Sports|Business|Sci/Tech"),
    "amazon_counterfactual_en": (60, 125, "not-counterfactual|counterfactual"),
    "app_reviews": (10, 77, "1|2|3|4|5"),
    "blog_authorship_corpus": (92, 556, "female|male"),
    "clickbait_notclickbait_dataset": (46, 69, "not|clickbait"),
    "climate_fever": (80, 156, "SUPPORTS|REFUTES|NOT_ENOUGH_INFO|DISPUTED"),
    "craigslist_bargains": (346, 713, "bike|car|electronics|furniture|housing|phone"),
    "disaster_response_messages": (74, 178, "direct|news|social"),
    "emo": (44, 83, "others|happy|sad|angry"),
    "emotion": (53, 129, "sadness|joy|love|anger|fear|surprise"),
    "enron_spam": (342, 1553, "ham|spam"),
    "financial_phrasebank": (79, 157, "negative|neutral|positive"),
    "FRENK-hate-en": (34, 160, "lgbt|migrants"),
    "hyperpartisan_news_detection": (39, 63, "False|True"),
    "limit": (53, 123, "no|yes"),
    "massive": (24, 44, "social|transport|calendar|play|news|datetime|recommendation|email|iot"
                "|general|audio|lists|qa|cooking|takeaway|music|alarm|weather"),
    "movie_rationales": (2721, 4659, "NEG|POS"),
    "mtop_domain": (26, 44, "messaging|calling|event|timer|music|weather|alarm|people|reminder"
                    "|recipes|news"),
    "patent-classification": (
        441, 775, "Human Necessities|Performing Operations; Transporting|Chemistry; Metallurgy"
        "|Textiles; Paper|Fixed Constructions|Mechanical Engineering; Lightning; Heating; Weapons; "
        "Blasting|Physics|Electricity|General tagging of new or cross-sectional technology"),
    "rotten_tomatoes": (76, 149, "neg|pos"),
    "silicone": (29, 75, "commissive|directive|inform|question"),
    "trec": (36, 61, "ABBR|ENTY|DESC|HUM|LOC|NUM"),
    "tweets_hate_speech_detection": (62, 107, "no-hate-speech|hate-speech"),
    "yahoo_answers_topics": (
        58, 213, "Society & Culture|Science & Mathematics|Health|Education & Reference"
        "|Computers & Internet|Sports|Business & Finance|Entertainment & Music"
        "|Family & Relationships|Politics & Government"),
    "yelp_review_full": (287, 957, "1 star|2 star|3 stars|4 stars|5 stars"),
}
LONG = "dropped " * 124 + "dropped."  # 1,000 characters: the shortest that is removed
DROPPED = {
    "blog_authorship_corpus": [LONG, "   "],
    "craigslist_bargains": [None],
    "disaster_response_messages": [None, "", LONG],
    "enron_spam": [None, ""],
    "FRENK-hate-en": [LONG],
    "hyperpartisan_news_detection": [None, ""],
    "patent-classification": [LONG],
}

# What a column holds. A function maps the name of a class; anything else is a constant, not read.
TEXT, PADDED, TITLE, CONTENT, CLASS, INTEGER, STARS, NAME, TRUTH = (object() for _ in range(9))

# (task, repository, files, columns). Files before the bar hold the rows of the task, in order;
# those after it, and a test split of each, must not be read. "@" stands for the parquet branch: a
# main branch without files has a script, which can no longer be loaded.
ALL = {"text": TEXT, "label": CLASS}
PLAIN = {"text": TEXT, "label": INTEGER}
NAMED = {**PLAIN, "label_text": NAME}
MAIL = {**NAMED, "subject": "re", "message": "body"}
BLOG = {"date": "14,May,2004", "gender": NAME, "age": 15}
DIALOGUE = {"Utterance": TEXT, "Dialogue_Act": NAME, "Idx": 0}
SCENARIO = {"scenario": CLASS, "intent": 1, "utt": TEXT, "annot_utt": "a request"}
TREC = {"text": TEXT, "coarse_label": CLASS, "fine_label": 1}
QUESTIONS = {  # its codes have an order of their own
    "text": TEXT, "label": 7, "label_text": "Manner of an action", "label_original": "DESC:manner",
    "label_coarse": "DESC ENTY ABBR HUM NUM LOC".split().index,
    "label_coarse_text": str.lower, "label_coarse_original": NAME}
TOPICS = {"topic": CLASS, "question_title": TITLE, "question_content": CONTENT,
          "best_answer": "an answer"}
COPIES = [
    ("ag_news", "fancyzhx/ag_news", "data/train*", ALL),
    ("amazon_counterfactual_en", "SetFit/amazon_counterfactual_en", "train.jsonl", NAMED),
    ("amazon_counterfactual_en", "SetFit/amazon_counterfactual_en", "@default/train", NAMED),
    ("app_reviews", "sealuzh/app_reviews", "data/train*", {"review": TEXT, "star": STARS}),
    ("blog_authorship_corpus", "barilan/blog_authorship_corpus",
     "@blog_authorship_corpus/train/0000.parquet @blog_authorship_corpus/train/0001.parquet",
     {"text": TEXT, **BLOG}),
    ("blog_authorship_corpus", "tasksource/blog_authorship_corpus", "blogtext.csv",
     {**BLOG, "text": PADDED}),
    ("clickbait_notclickbait_dataset", "christinacdl/clickbait_notclickbait_dataset",
     "train.json | val.json", PLAIN),
    ("climate_fever", "tdiggelm/climate_fever", "data/test*",
     {"claim": TEXT, "claim_label": CLASS, "evidences": ["some evidence"]}),
    ("craigslist_bargains", "aladar/craigslist_bargains", "train.csv | validation.csv", PLAIN),
    ("craigslist_bargains", "aladar/craigslist_bargains", "@default/train | @default/validation",
     PLAIN),
    ("disaster_response_messages", "community-datasets/disaster_response_messages",
     "data/train* | data/validation*",
     {"message": TEXT, "original": "", "genre": NAME, "related": 1}),
    ("emo", "aladar/emo", "emo-train.arrow", ALL),
    ("emo", "aladar/emo", "@default/train", ALL),
    ("emotion", "dair-ai/emotion", "split/train* | split/validation* unsplit/train*", ALL),
    ("enron_spam", "SetFit/enron_spam", "train.jsonl | enron_spam_data.csv", MAIL),
    ("enron_spam", "SetFit/enron_spam", "@default/train", MAIL),
    ("financial_phrasebank", "mteb/FinancialPhrasebankClassification", "data/train*", PLAIN),
    ("financial_phrasebank", "takala/financial_phrasebank",
     "@sentences_allagree/train | @sentences_50agree/train @sentences_66agree/train",
     {"sentence": TEXT, "label": CLASS}),
    ("financial_phrasebank", "ghbacct/financial-phrasebank-all-agree-classification",
     "data/train* data/test*", {"text": TEXT, "label": NAME}),
    ("FRENK-hate-en", "classla/FRENK-hate-en", "@binary/train | @multiclass/train",
     {"text": TEXT, "topic": NAME, "label": 1}),
    ("hyperpartisan_news_detection", "pietrolesci/hyperpartisan_news_detection",
     "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet | data/validation*",
     {"text": "body", "title": TEXT, "hyperpartisan": TRUTH, "bias": 1}),
    ("limit", "IBM/limit", "@default/train",
     {"sentence": TEXT, "motion": NAME, "motion_entities": ["he"]}),
    ("massive", "AmazonScience/massive",
     "@en-US/train | @en-US/validation @fr-FR/train @all/train", SCENARIO),
    ("massive", "mteb/amazon_massive_scenario", "en/train* | fr/train*",
     {"label": NAME, "label_text": NAME, "text": TEXT, "lang": "en"}),
    ("movie_rationales", "eraser-benchmark/movie_rationales", "@default/train",
     {"review": TEXT, "label": CLASS, "evidences": ["a phrase"]}),
    ("mtop_domain", "mteb/MTOPDomainClassification", "en/train* | de/train*", NAMED),
    ("mtop_domain", "mteb/mtop_domain", "@en/train | @de/train", NAMED),
    ("patent-classification", "ccdv/patent-classification", "@abstract/train | @patent/train", ALL),
    ("rotten_tomatoes", "cornell-movie-review-data/rotten_tomatoes", "train.parquet", ALL),
    ("silicone", "tasksource/silicone", "dyda_da/train.parquet | dyda_e/train.parquet",
     {**DIALOGUE, "Label": INTEGER}),
    ("silicone", "eusip/silicone", "@dyda_da/train | @dyda_e/train", {**DIALOGUE, "Label": CLASS}),
    ("trec", "CogComp/trec", "@default/train", TREC),
    ("trec", "tasksource/trec", "data/train*", TREC),
    ("trec", "SetFit/TREC-QC", "train.jsonl", QUESTIONS),
    ("tweets_hate_speech_detection", "tweets-hate-speech-detection/tweets_hate_speech_detection",
     "@default/train", {"label": CLASS, "tweet": TEXT}),
    ("yahoo_answers_topics", "community-datasets/yahoo_answers_topics",
     "yahoo_answers_topics/train*", TOPICS),
    ("yelp_review_full", "Yelp/yelp_review_full", "yelp_review_full/train*", ALL),
]
COMMITS = {  # pinned on the real Hub
    ("mteb/amazon_massive_scenario", "main"): "fad2c6e8459f9e1c45d9315f4953d921437d70f8"}


def label_names(task):
    return TASKS[task][2].split("|")


def expected(task):
    """The (text, class) pairs that a correct load returns."""
    names, pairs = label_names(task), []
    for row in range(36):
        text = f"{names[row % len(names)]}: {row} NA"
        if task == "limit":  # its sentences begin with a space
            text = " " + text
        if task == "yahoo_answers_topics":  # title, content; a third of the contents is empty
            text += "\n" + "content" * (row % 3)
        if row == 35 and LONG in DROPPED.get(task, []):
            text = text.ljust(999, ".")  # the longest that is kept
        pairs.append((text, row % len(names)))
    return pairs


def served(task):
    """These, and the rows that a filter drops, under another class than their neighbours."""
    pairs = expected(task)
    dropped = [(text, len(label_names(task)) - 1) for text in DROPPED.get(task, [])]
    return dropped[:1] + pairs[:9] + dropped[1:] + pairs[9:]


def cell(kind, text, label, names):
    """One value of a column of the given kind."""
    if kind is TITLE or kind is CONTENT:
        return text.split("\n", 1)[kind is CONTENT]
    if callable(kind):
        return kind(names[label])
    values = {TEXT: text, PADDED: text and f"  {text}\n ", CLASS: label, INTEGER: label,
              STARS: label + 1, NAME: names[label], TRUTH: names[label] == "True"}
    return values[kind] if type(kind) is object else kind


def write_file(path, pairs, columns, names):
    path.parent.mkdir(parents=True, exist_ok=True)
    data, types, features = {}, {}, {}
    for column, kind in columns.items():
        data[column] = [cell(kind, *pair, names) for pair in pairs]
        types[column] = pa.int8() if kind is STARS else pa.array(data[column]).type
        if kind is CLASS:
            features[column] = {"names": names, "_type": "ClassLabel"}
    # how the names of labels travel inside a file
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table(data, schema=pa.schema(types.items(), metadata=metadata))
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *zip(*data.values())])
    else:
        path.write_text("".join([json.dumps(row) + "\n" for row in table.to_pylist()]))


def commit(repository, branch):
    sha = hashlib.sha1(f"{repository} {branch}".encode()).hexdigest()
    return COMMITS.get((repository, branch), sha)


def write_repositories(folder):
    for task, repository, files, columns in COPIES:
        right, _, wrong = files.partition("|")
        right = right.split()
        tests = [name.replace("train", "test") for name in right]
        wrong = [*wrong.split(), *[name for name in tests if name not in right]]
        main, configs = folder / repository / commit(repository, "main"), {}
        for number, name in enumerate(right + wrong):
            branch, path = main, name.replace("*", "-00000-of-00001.parquet")
            if name[0] == "@":
                branch, path = main.with_name(commit(repository, "parquet")), path[1:]
                if not path.endswith(".parquet"):
                    path += "/0000.parquet"
            pairs = served(task)
            if number < len(right):  # the rows in order, over as many files as the real copy has
                size = -(-len(pairs) // len(right))
                pairs = pairs[number * size : (number + 1) * size]
            else:
                pairs = [(f"{path} {text}", label) for text, label in pairs]
            write_file(branch / path, pairs, columns, label_names(task))
            if branch == main and "/" in path and not path.startswith("data/"):
                config, split = path.split("/")
                split = re.match("[a-z]+", split)[0]
                configs.setdefault(config, []).append(
                    {"split": split, "path": f"{config}/{split}*"})
        if not main.exists():
            main.mkdir()
            (main / f"{main.parent.name}.py").write_text("raise SystemExit('this must not run')\n")
        if configs:  # of these copies, only emotion has a default config
            head = [{"config_name": config, "data_files": files, "default": config == "split"}
                    for config, files in configs.items()]
            (main / "README.md").write_text(f"---\n{json.dumps({'configs': head})}\n---\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        url = urlsplit(self.path)
        path = unquote(url.path).replace("refs/convert/parquet", "parquet")  # without slashes
        path = re.sub("^/(api/)?(datasets/|models/)?", "", path)
        owner, name, kind, revision, file = (path.split("/", 4) + [""] * 4)[:5]
        repository, sha = f"{owner}/{name}", revision
        if revision in ("", "main", "parquet"):
            sha = commit(repository, revision or "main")
        branch = self.server.folder / repository / sha
        for place, lacking in ((branch.parent, "RepoNotFound"), (branch, "RevisionNotFound"),
                               (branch / file, "EntryNotFound")):
            if not place.exists():
                return self.send(b"", 404, X_Error_Code=lacking, X_Repo_Commit=sha)
        if kind == "resolve":
            content = (branch / file).read_bytes()
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.send(content, ETag=etag, X_Repo_Commit=sha)
        if kind == "tree":
            pattern = "**/*" if "recursive=true" in url.query.lower() else "*"
            answer = [{"type": "directory" if path.is_dir() else "file",
                       "path": path.relative_to(branch).as_posix(), "size": path.stat().st_size,
                       "oid": hashlib.sha1(str(path).encode()).hexdigest()}
                      for path in sorted((branch / file).glob(pattern))]
        else:
            files = [path for path in sorted(branch.rglob("*")) if path.is_file()]
            names = [{"rfilename": path.relative_to(branch).as_posix()} for path in files]
            answer = {"id": repository, "sha": sha, "siblings": names, "private": False}
        self.send(json.dumps(answer).encode(), Content_Type="application/json")

    do_HEAD = do_GET


@contextmanager
def fake_hub(folder):
    """Writes the repositories into the folder and serves them; gives the HF_ENDPOINT."""
    write_repositories(Path(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder = Path(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
