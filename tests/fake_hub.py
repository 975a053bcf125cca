"""A stand-in for the Hugging Face Hub: the data sets of the 25 tasks as folders, and parquet
branches in the layout of its cache, typed from the paper and the data set cards. Each has the
columns and label types of the real one, and 36 rows. A text that a load must not return begins
with "dropped" or the path of its file."""

import json

import datasets

# Repository (after TASK: if that has another name), files with its rows in order, column=kind
# (default text=text label=class). "!" marks a file that must not be read, "@" the parquet branch.
# Then the classes in order; if the data has another name for one, it comes first: neg=negative.
TABLE = """
fancyzhx/ag_news data/train*
World|Sports|Business|Sci/Tech
SetFit/amazon_counterfactual_en train.jsonl label=code
not counterfactual|counterfactual
sealuzh/app_reviews data/train* review=text star=star
1|2|3|4|5
barilan/blog_authorship_corpus \
@blog_authorship_corpus/train/0 @blog_authorship_corpus/train/1 gender=name
female|male
christinacdl/clickbait_notclickbait_dataset train.json \
!val.json label=code
not clickbait|clickbait
tdiggelm/climate_fever data/test* claim=text claim_label=class
SUPPORTS=supported|REFUTES=refuted|NOT_ENOUGH_INFO=not enough info|DISPUTED=disputed
aladar/craigslist_bargains train.csv !validation.csv label=code
bike|car|electronics|furniture|housing|phone
community-datasets/disaster_response_messages data/train* \
!data/validation* message=text genre=name
direct=direct message|news=news story|social=social media post
aladar/emo emo-train.parquet
others|happy|sad|angry
dair-ai/emotion split/train* !unsplit/train*
sadness|joy|love|anger|fear|surprise
SetFit/enron_spam train.jsonl !enron_spam_data.csv label=code
ham|spam
financial_phrasebank:mteb/FinancialPhrasebankClassification data/train* label=code
negative|neutral|positive
classla/FRENK-hate-en @binary/train/0 !@multiclass/train/0 topic=name
lgbt=LGBT|migrants
pietrolesci/hyperpartisan_news_detection \
data/train-0.parquet data/train-1.parquet !data/validation* title=text hyperpartisan=truth
False=not hyperpartisan|True=hyperpartisan
IBM/limit @default/train/0 sentence=text motion=name
no=no motion|yes=motion
AmazonScience/massive @en-US/train/0 !@all/train/0 utt=text scenario=class
social|transport|calendar|play|news|datetime|recommendation|email|iot|general|audio|lists|qa\
|cooking|takeaway|music|alarm|weather
eraser-benchmark/movie_rationales @default/train/0 review=text \
label=class
NEG=negative|POS=positive
mtop_domain:mteb/MTOPDomainClassification en/train* !de/train* label=code
messaging|calling|event|timer|music|weather|alarm|people|reminder|recipes|news
ccdv/patent-classification @abstract/train/0 !@patent/train/0
Human Necessities|Performing Operations; Transporting|Chemistry; Metallurgy|Textiles; Paper\
|Fixed Constructions|Mechanical Engineering; Lightning; Heating; Weapons; Blasting|Physics\
|Electricity|General tagging of new or cross-sectional technology
cornell-movie-review-data/rotten_tomatoes train.parquet
neg=negative|pos=positive
tasksource/silicone dyda_da/train.parquet !dyda_e/train.parquet Utterance=text \
Label=code
commissive|directive|inform|question
CogComp/trec @default/train/0 coarse_label=class
ABBR=Abbreviation|ENTY=Entity|DESC=Description and abstract concept|HUM=Human being|LOC=Location\
|NUM=Numeric value
tweets-hate-speech-detection/tweets_hate_speech_detection \
@default/train/0 tweet=text label=class
no-hate-speech=not hate speech|hate-speech=hate speech
community-datasets/yahoo_answers_topics yahoo_answers_topics/train* \
topic=class question_title=title question_content=content
Society & Culture|Science & Mathematics|Health|Education & Reference|Computers & Internet|Sports\
|Business & Finance|Entertainment & Music|Family & Relationships|Politics & Government
Yelp/yelp_review_full yelp_review_full/train*
1 star=1|2 star=2|3 stars=3|4 stars=4|5 stars=5
"""
LONG = "dropped " * 124 + "dropped."  # 1,000 characters: one too many
DROPPED = {
    "blog_authorship_corpus": [LONG, "   "], "craigslist_bargains": [None],
    "disaster_response_messages": [None, "", LONG], "enron_spam": [None, ""],
    "FRENK-hate-en": [LONG], "hyperpartisan_news_detection": [None, ""],
    "patent-classification": [LONG]}
TASKS = {}  # by name: names in the data, classes, repository and so on
lines = TABLE.strip().splitlines()
for words, classes in zip(lines[::2], lines[1::2]):
    words = words.split()
    task, _, words[0] = words[0].rpartition(":")
    task = task or words[0].partition("/")[2]
    pairs = [name.split("=") for name in classes.split("|")]
    names, classes = [pair[0] for pair in pairs], [pair[-1] for pair in pairs]
    TASKS[task] = names, classes, words


def expected(task):
    names, pairs = TASKS[task][0], []
    for row in range(36):
        text = f"{names[row % len(names)]}: {'x' * row} NA"
        if task == "limit":  # its sentences begin with a space
            text = " " + text
        if task == "yahoo_answers_topics":  # a third of the contents is empty
            text += "\n" + "content" * (row % 3)
        if row == 35 and LONG in DROPPED.get(task, []):
            text = text.ljust(999, ".")  # it is kept
        pairs.append((text, row % len(names)))
    return pairs


def write_file(path, pairs, columns, names):
    path.parent.mkdir(parents=True, exist_ok=True)
    texts, codes = zip(*pairs)
    kinds = {"text": texts, "title": [f"{text}".partition("\n")[0] for text in texts],
             "content": [f"{text}".partition("\n")[2] for text in texts],
             "code": codes, "class": codes, "star": [code + 1 for code in codes],
             "name": [names[code] for code in codes], "truth": [code == 1 for code in codes]}
    data = datasets.Dataset.from_dict({column: kinds[columns[column]] for column in columns})
    for column, kind in columns.items():
        if kind == "class":
            data = data.cast_column(column, datasets.ClassLabel(names=names))
    writers = {".csv": data.to_csv, ".parquet": data.to_parquet}
    writers.get(path.suffix, data.to_json)(path)


def write_hub(folder):
    """Writes main branches as folder/OWNER/NAME, and parquet branches into folder/cache."""
    for task, (names, _, (repository, *words)) in TASKS.items():
        given = dict([word.split("=") for word in words if "=" in word])
        columns = given if len(given) > 1 else {"text": "text", **(given or {"label": "class"})}
        right = [word for word in words if "=" not in word and word[0] != "!"]
        wrong = [word[1:] for word in words if word[0] == "!"]
        wrong += {name.replace("train", "test") for name in right} - {*right}
        rows, configs = expected(task), {}
        if task == "blog_authorship_corpus":
            rows = [(f" {text}\n", label) for text, label in rows]
        dropped = [(text, len(names) - 1) for text in DROPPED.get(task, [])]
        rows = dropped[:1] + rows[:9] + dropped[1:] + rows[9:]
        size = -(-len(rows) // len(right))
        for number, name in enumerate(right + wrong):
            branch, path = folder / repository, name.replace("*", "-00000-of-00001.parquet")
            if name[0] == "@":
                cached = folder / "cache" / f"datasets--{repository.replace('/', '--')}"
                (cached / "refs/refs/convert").mkdir(parents=True, exist_ok=True)
                (cached / "refs/refs/convert/parquet").write_text("branch")
                branch, path = cached / "snapshots/branch", f"{path[1:]}.parquet"
            elif "/" in path and not path.startswith("data/"):
                split = "test" if "test" in path else "train"
                config = configs.setdefault(path.split("/")[0], [])
                config.append({"split": split, "path": path})
            pairs = rows[number * size : (number + 1) * size]
            if number >= len(right):
                pairs = [(f"{path} {text}", label) for text, label in rows]
            write_file(branch / path, pairs, columns, names)
        if configs:
            head = [{"config_name": config, "data_files": configs[config]} for config in configs]
            (branch / "README.md").write_text(f"---\n{json.dumps({'configs': head})}\n---\n")
