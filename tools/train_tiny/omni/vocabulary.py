"""The words that the model knows: some 1,750, each one token, and small tables of facts about them."""

from __future__ import annotations


def _read(text: str) -> list[str]:
    return text.split()


ONES = _read("""
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
""")
"""Zero to nineteen."""

TENS = _read("""
twenty thirty forty fifty sixty seventy eighty ninety
""")
"""Twenty to ninety."""

LETTERS = _read("""
a b c d e f g h i j k l m n o p q r s t u v w x y z
""")

COLORS = _read("""
red green blue yellow orange purple pink brown black white gray golden silver
""")

DAYS = _read("""
monday tuesday wednesday thursday friday saturday sunday
""")

MONTHS = _read("""
january february march april may june july august september october november december
""")

ANIMALS = _read("""
dog cat horse cow pig sheep goat duck chicken rabbit lion tiger bear wolf fox monkey elephant giraffe zebra frog snake
turtle shark whale dolphin eagle owl parrot penguin bee ant spider butterfly kangaroo camel deer squirrel hamster crab
octopus
""")

FRUITS = _read("""
apple banana cherry grape lemon lime peach pear plum mango melon pineapple strawberry coconut apricot kiwi fig
""")

FOODS = _read("""
bread butter cheese milk egg rice soup salad pasta pizza cake cookie sugar salt pepper honey chocolate coffee tea
juice potato tomato carrot onion bean corn mushroom sandwich burger noodle cream sauce candy
""")

CAPITALS = dict(
    pair.split("-")
    for pair in _read("""
france-paris italy-rome spain-madrid germany-berlin england-london japan-tokyo china-beijing russia-moscow egypt-cairo
greece-athens portugal-lisbon austria-vienna sweden-stockholm norway-oslo finland-helsinki denmark-copenhagen
poland-warsaw ireland-dublin canada-ottawa cuba-havana india-delhi kenya-nairobi peru-lima turkey-ankara iran-tehran
iraq-baghdad hungary-budapest belgium-brussels thailand-bangkok vietnam-hanoi chile-santiago australia-canberra
ukraine-kyiv nepal-kathmandu iceland-reykjavik switzerland-bern jamaica-kingston morocco-rabat scotland-edinburgh
wales-cardiff
""")
)
"""Countries with their capitals."""

OPPOSITES = dict(
    pair.split("-")
    for pair in _read("""
big-small hot-cold good-bad long-short tall-short high-low wide-narrow deep-shallow thick-thin heavy-light warm-cool
wet-dry clean-dirty new-old young-old fast-slow early-late easy-difficult hard-soft loud-quiet bright-dark happy-sad
strong-weak rich-poor safe-dangerous brave-afraid kind-mean beautiful-ugly clever-stupid strange-normal full-empty
open-closed sharp-blunt sweet-sour true-false right-wrong best-worst better-worse same-different inside-outside
near-far left-right above-below before-after up-down always-never everything-nothing day-night summer-winter
hello-goodbye yes-no black-white love-hate win-lose begin-end push-pull give-take buy-sell ask-answer laugh-cry
sit-stand sleep-wake rise-fall start-stop king-queen man-woman boy-girl brother-sister mother-father north-south
east-west friend-enemy war-peace life-death first-last
""")
)

IRREGULAR_PLURALS = dict(
    pair.split("-")
    for pair in _read("""
leaf-leaves man-men woman-women tooth-teeth foot-feet mouse-mice knife-knives wolf-wolves shelf-shelves baby-babies
child-children fish-fish sheep-sheep deer-deer goose-geese half-halves
""")
)

THING_COLORS = dict(
    pair.split("-")
    for pair in _read("""
the_sky-blue grass-green the_sun-yellow snow-white an_apple-red a_banana-yellow a_lemon-yellow a_tomato-red
a_carrot-orange coal-black the_night-black milk-white blood-red a_leaf-green a_frog-green a_cherry-red
a_strawberry-red chocolate-brown wood-brown coffee-brown the_sea-blue a_cloud-white sand-yellow fire-orange
an_elephant-gray a_shark-gray a_pig-pink a_plum-purple a_grape-purple a_lime-green butter-yellow honey-golden
rice-white sugar-white salt-white a_mouse-gray a_crab-red a_fox-orange a_bear-brown a_potato-brown cheese-yellow
mud-brown gold-golden smoke-gray a_crocodile-green a_rose-red ice-white oil-black
""")
)
"""Things, their article joined to them by a low line, with their color."""

NOUNS = _read("""
house home door window room wall floor roof kitchen garden tree flower leaf forest river lake sea ocean beach island
mountain hill valley road street bridge city town village school teacher student class book page letter word story
song music picture paper pen pencil desk chair table bed lamp clock watch phone computer screen key box bag bottle cup
glass plate bowl spoon fork knife shirt coat hat shoe sock dress ring car bus train plane boat ship bicycle wheel
engine machine tool hammer nail rope wood stone metal gold iron fire water ice snow rain wind storm cloud sky sun moon
star planet earth world country king queen prince baby boy girl man woman father mother brother sister son daughter
uncle aunt cousin friend neighbor doctor nurse farmer driver soldier artist singer player team game ball toy party
gift birthday holiday morning afternoon evening night day week month year hour minute second summer winter spring
autumn color shape circle square triangle line point side corner number answer question name voice sound noise light
shadow dream idea plan problem reason truth secret lesson test exam mistake chance change choice heart head face eye
ear nose mouth tooth tongue hair neck shoulder arm hand finger leg knee foot bone skin blood brain body health
medicine hospital market shop store price money coin bank office job work boss message news map trip journey ticket
hotel station airport farm field grass seed fruit animal bird fish insect cage nest egg wing tail feather museum
theater library church tower castle palace park pool sport goal score race winner prize medal camera radio film video
robot model energy power battery button switch wire paint brush soap towel mirror blanket pillow sheet basket bucket
ladder shelf drawer carpet curtain candle match smoke dust sand mud oil gas steam
""")

ADJECTIVES = _read("""
good bad big small large little long short tall high low wide narrow deep thick thin heavy light hot cold warm cool
wet dry clean dirty new old young fast slow quick early late easy hard soft loud quiet bright dark happy sad angry
tired hungry thirsty sick healthy strong weak rich poor safe dangerous brave afraid kind nice pretty beautiful ugly
clever smart funny serious strange simple perfect full empty open round flat sharp sweet sour bitter fresh true false
right wrong best better worse worst same different important famous free busy ready lucky lonely gentle polite proud
shy lazy crazy huge tiny great lovely wonderful special common rare possible certain ancient modern national local
human natural public private final main whole single double electric plastic wooden
""")

VERBS = _read("""
ask answer begin believe borrow break bring build burn buy call carry catch change choose clean climb close come cook
copy count cover cross cry cut dance decide dig draw dream drink drive drop eat enjoy enter explain fall feed feel
fight fill find finish fix float fly follow forget forgive get give go grow guess happen hate have hear help hide hit
hold hope hurt invite join jump keep kick knock know laugh lead learn leave lend let lie lift like listen live look
lose love make mean measure meet melt mix move need notice open order paint pass pay pick plan plant play point pour
pray prefer prepare press promise pull push put rain reach read remember repeat reply rest return ride ring rise roll
run save say search see sell send share shine shoot shout show shut sing sit sleep smell smile smoke speak spell spend
spread stand start stay steal stop study swim take talk taste teach tell thank think throw tie touch travel try turn
type understand use visit wait wake walk want warn wash waste watch wear win wish wonder work worry write yell
""")

PARTICLES = _read("""
the of and to in is you that it he was for on are as with his they at be this from i have or by had not but what all
were we when your can said there each which she do how their if will up other about out many then them these so some
her would him into time has two more no way could people my than first been who now oh its over after only also back
any our under again where why here very just much before through off always never sometimes often soon later yesterday
today tomorrow maybe please thanks hello goodbye yes sorry too still almost enough quite really together alone away
around behind between above below near far inside outside left right during while because although until since without
against toward across along among beside both either neither every another nothing something everything anything
nobody somebody everybody myself yourself himself itself ourselves themselves mister missus am being did does done
went gone came took taken gave given made knew known saw seen thought told felt found kept held brought bought sold
stood sat ran began wrote written spoke spoken ate eaten drank swam flew drove grew fell broke chose wore won lost met
paid led heard understood half third quarter dozen hundred thousand million plus minus times equals divided
""")
"""Words that hold sentences together, and forms of irregular verbs."""

FURTHER = _read("""
chapter language english french spanish german italian chinese japanese science history nature culture law art
mathematics physics chemistry biology geography religion government president minister leader member group company
business industry product service system program project method result effect cause theory practice example case level
degree part piece section area region center middle edge top bottom front surface space distance length width height
weight speed temperature pressure value amount total average rate percent increase decrease difference relation
position direction movement action activity process development growth progress success failure fear joy anger
surprise hope trust respect honor peace war battle victory freedom justice crime police judge prison army navy enemy
danger accident disease pain death life birth marriage family child children adult people person human crowd society
community audience meeting conference speech discussion opinion argument agreement decision rule order permission
advice suggestion information knowledge memory imagination experience skill talent ability habit custom tradition
fashion style beauty quality taste smell touch sight thunder lightning rainbow sunrise sunset horizon desert jungle
volcano earthquake flood fog frost breeze weather climate season oxygen hydrogen carbon crystal diamond emerald
measure vision treasure pleasure usual casual genre garage massage television version occasion thing they though
through thick thumb thief either breathe bathe smooth gym jacket giant orange bridge village jelly yacht yogurt yell
union music few view queen quick quiet square choir voice choice noise boy oil join town house cloud out loud brown
owl
""")
"""Abstract nouns, and words for sounds that are rare elsewhere."""

QUESTION_WORDS = _read("""
well me capitals
calculate add subtract multiply divide sum minus spell opposite plural count repeat tell who whats which hi hey bye
thanks hello color colour capital comes next previous today call named help welcome fine care are and can name doing
afternoon hundred from down please say would should does did could word number backwards letters spelling mean means
called weather news joke poem president best favorite translate email explain love like tiny model small robot human
real old live made speak sing dance see hear think feel know want need where when why how what is there any some not
anyone hold keep sky goose coal blood rose crocodile south north east west shallow difficult stupid normal closed
blunt end wake last halves
""")
"""What questions are made of, beside the words above."""

HELD_OUT_SENTENCES = """
two plus three equals five
seven minus four equals three
six times two equals twelve
nine plus one equals ten
eight divided by two equals four
the sky is blue
grass is green
the sun is yellow
snow is white
the apple is red
hello how are you
good morning
nice to meet you
my name is tiny
i can speak
one two three four five
six seven eight nine ten
the capital of france is paris
the capital of italy is rome
a dog is an animal
the cat sat on the table
water is wet
there are seven days in a week
there are twelve months in a year
cat is spelled c a t
a square has four sides
a circle is round
today is a good day
thank you very much
goodbye my friend
""".strip().split("\n")
"""Speech is judged by these thirty; no sound that anything is trained on says one of them."""

OBJECTS = _read("""
house door window chair table bed lamp clock bottle cup plate spoon shirt coat hat shoe car bus train boat ship hammer
rope river mountain bridge book pencil phone computer pillow blanket candle ladder
""")
"""Things that are neither animals nor fruits nor colors."""

SPOKEN_VERBS = _read("""
ask answer begin break bring build burn buy call carry catch change clean climb close come cook count cry dance draw
dream drink drive eat enjoy fall feel fight find fly follow go grow help hide hold jump keep laugh learn listen live
look make move open paint play push read sing sleep smile speak stand talk teach think throw travel try wait walk wash
watch wear work write
""")
"""Verbs whose -ing form is a word of its own."""


def plural(noun: str) -> str:
    """The plural of a noun."""
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh", "z")) or noun in ("tomato", "potato", "mango"):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def going(verb: str) -> str:
    """The -ing form of one of `SPOKEN_VERBS`."""
    return (verb[:-1] if verb.endswith("e") and not verb.endswith("ee") else verb) + "ing"


def article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def spoken(number: int) -> str:
    """A number from 0 to 199 in words."""
    if number >= 100:
        rest = number - 100
        return "one hundred" + (f" {spoken(rest)}" if rest else "")
    if number < 20:
        return ONES[number]
    return TENS[number // 10 - 2] + (f" {ONES[number % 10]}" if number % 10 else "")


_UNCOUNTED = frozenset(
    _read("""
grass music fire water snow rain blood light sand mud oil gas steam smoke gold iron wood
""")
)
COUNTED = [noun for noun in dict.fromkeys([*NOUNS, *ANIMALS, *FRUITS]) if noun not in _UNCOUNTED]
"""Nouns that have a plural."""
PLURALS = [plural(noun) for noun in COUNTED]
GOING = [going(verb) if verb != "begin" else "beginning" for verb in SPOKEN_VERBS]


def _all() -> list[str]:
    tables = (CAPITALS, OPPOSITES, IRREGULAR_PLURALS)
    things = " ".join(THING_COLORS).replace("_", " ").split()
    found = [*ONES, *TENS, *LETTERS, *COLORS, *DAYS, *MONTHS, *ANIMALS, *FRUITS, *FOODS, *things]
    found += [word for table in tables for pair in table.items() for word in pair]
    found += [*NOUNS, *ADJECTIVES, *VERBS, *PARTICLES, *FURTHER, *QUESTION_WORDS, *OBJECTS, *PLURALS, *GOING]
    found += " ".join(HELD_OUT_SENTENCES).split()
    return sorted(set(found))


WORDS = _all()
"""All of them, in order of the alphabet."""
