"""The words that conversations for a draft head are made of (`prompts.py`)."""


def _listed(text: str) -> tuple[str, ...]:
    return tuple(" ".join(one.split()) for one in text.split(";") if one.strip())


QUESTIONS = _listed("""
Explain {} in simple words.; Describe {}.; Summarize what is known about {}.; What is {}?; What are the
disadvantages of {}?; List the advantages of {}.; Tell me the history of {}.; How do I get started with {}?;
What are common mistakes people make with {}?; What is the best way to think about {}?; Give three examples that
have to do with {}.; Why is it useful to know something about {}?; Name five things that everybody should know
about {}.; Why is {} important?; How does {} work?; Tell me something surprising about {}.; What do you think of
{}?; What questions would a student ask about {}?; I have to give a talk on {}. Where do I begin?; What are the
most important terms when people discuss {}?; How has {} changed over the last hundred years?; Can you tell me
more about {}?; I never understood {}. Please help me.; What role does {} play in daily life?; Which myths about
{} are wrong?; What will become of {} in the future?; Is {} good or bad for the environment?; How is {} taught
in schools?; Who should care about {}?; Define {} in one sentence.; What is the science behind {}?; Give me a
detailed overview of {}.; What are the key facts on {}?; What do experts disagree about when it comes to {}?;
How would you measure {}?; What does {} cost?; How would you explain {} to your grandparents?; What are
different kinds of {}?; Quiz me on {}.; What books should I read about {}?; Break down {} step by step.; What
are the pros and cons of {}?; What makes {} interesting?; tell me about {}; {}; whats {}
""")

TEXTS = _listed("""
Write a paragraph about {}.; Write a short poem about {}.; Write an email about {}.; Write a story for children
about {}.; Write two sentences about {}.; Write a blog post about {}.; Write a short story that involves {}.;
Write a song about {}.; Write a speech about {}.; Write a headline for an article about {}.; Write an
advertisement for {}.; Write a letter to a friend about {}.; Write an essay of five paragraphs on {}.; Write a
limerick about {}.; Write a scene of a film about {}.; Compose a tweet about {}.; Draft an introduction to a
report on {}.; Create an outline for a lesson on {}.; Create a quiz with four questions about {}.; Make a table
of facts about {}.; Write a riddle about {}.; Write a product description that has to do with {}.; Write a diary
entry about {}.; Write a rhyme about {}.; Write a dialogue in which two people argue about {}.; Invent a legend
about {}.; Write a news report about {}.; Write instructions about {} for beginners.; Write a letter to the
editor about {}.; Write a review of a book on {}.
""")

MANNERS = _listed("""
Keep it short.; Use bullet points.; Make it funny.; Use simple language.; Be formal.; Use at most fifty words.;
Write for experts.; Write for children.; Add an example.; End with a question.; Make it sound exciting.; Use a
numbered list.; Write in the first person.; Do not use difficult words.; Include a title.; Be persuasive.; Use
headings.; Write in the style of an old newspaper.; Be honest.; Use vivid images.
""")

ADVICE = _listed("""
How can I get better at {}?; Give me tips for {}.; What do I need for {}?; Make a plan for {}.; What should I
avoid when it comes to {}?; I want to try {}. What should I do first?; How much time does {} take?; My friend
loves {}. What gift would be right?; Is {} expensive?; What are the benefits of {}?; How do professionals
approach {}?; Write a checklist for {}.; I am bad at {} and feel discouraged. What can I do?; What are good
habits for {}?; Give me a schedule for {}.; How do I teach {} to a child?; What can go wrong with {}?; Suggest
five ideas for {}.; How do I stay motivated while {}?; What equipment is best for {}?; Help me with {}.; Is {}
safe?; How do I explain to my boss that I need a day off for {}?; What are some alternatives to {}?
""")

ACTIVITIES = _listed("""
baking bread; learning French; running a marathon; saving for a house; growing tomatoes; organising a party;
writing a novel; painting a room; raising chickens; playing chess; studying at night; working from home; looking
for a job; moving to another city; losing weight; training a puppy; building a website; buying a used car;
taking portraits; cleaning the kitchen; knitting a scarf; reading more books; sleeping better; going vegetarian;
meditation; speaking in public; making new friends; travelling alone; hosting a dinner; repairing a bike;
writing a thesis; doing taxes; planning a wedding; starting a company; brewing coffee; camping in winter;
learning to swim; singing in a choir; collecting stamps; watching birds; fishing; sewing a dress; editing
videos; learning to drive; playing the drums; solving puzzles; woodworking; making soap; keeping bees; surfing;
applying to university; caring for an elderly parent; choosing a laptop; quitting smoking; making a budget;
preparing a presentation; decorating a small flat; cooking for ten people; rock climbing; writing a cover
letter; playing with toddlers; practising the violin; keeping a diary; volunteering; negotiating a salary;
pottery; remembering names; growing herbs indoors; making pasta; training for a triathlon; organising photos;
juggling; learning to type; recording a podcast; designing a logo; reducing waste; packing a suitcase; ironing
shirts; restoring furniture; dealing with stress; sailing; making a film; playing poker; doing research;
grilling fish
""")

PERSONS = _listed("""
Albert Einstein; Cleopatra; Leonardo da Vinci; William Shakespeare; Isaac Newton; Nelson Mandela; Julius Caesar;
Ada Lovelace; Charles Darwin; Mahatma Gandhi; Galileo Galilei; Frida Kahlo; Ludwig van Beethoven; Aristotle;
Abraham Lincoln; Queen Victoria; Napoleon Bonaparte; Alan Turing; Florence Nightingale; Johannes Gutenberg;
Vincent van Gogh; Rosa Parks; Christopher Columbus; Socrates; Nikola Tesla; Jane Austen; Confucius; Mark Twain;
Amelia Earhart; Johann Sebastian Bach; Alexander the Great; Martin Luther King; Joan of Arc; Archimedes; Thomas
Edison; Pablo Picasso; Genghis Khan; Neil Armstrong; Benjamin Franklin; Virginia Woolf; Homer; Plato; Louis
Pasteur; Marco Polo; Anne Frank; Michelangelo; Simón Bolívar; Rembrandt; Emily Dickinson; Ernest Hemingway;
Agatha Christie; Henry Ford; the Wright brothers; Mozart; Sigmund Freud; Karl Marx; George Washington;
Pythagoras
""")
OF_PERSONS = _listed("""
Who was {}?; What is {} famous for?; Write a short biography of {}.; When did {} live?; What can we learn from
{}?; Imagine an interview with {}.; Write a letter to {}.; Name three facts about {}.; What would {} say about
our time?; How did {} change the world?; Describe a day in the life of {}.; What did others think of {}?
""")

PLACES = _listed("""
Paris; Tokyo; Brazil; the Alps; New York; Kenya; Rome; the Sahara; Australia; Norway; Istanbul; Peru; Vietnam;
the Amazon; Scotland; Morocco; Seoul; the Grand Canyon; Greece; Antarctica; London; Cuba; Thailand; Prague;
Chile; the Great Wall of China; South Africa; Hawaii; Vienna; Turkey; Ireland; the Netherlands; Florence;
Alaska; Nepal; the Mediterranean; Sweden; Jamaica; Singapore; Venice; Argentina; the Nile; Mount Everest;
California; Poland; Barcelona; Indonesia; Finland; Dubai; Texas; Ethiopia; Switzerland; Chicago; Portugal;
Hungary; the Moon
""")
OF_PLACES = _listed("""
What should I see in {}?; Describe {}.; What is the climate of {} like?; Plan a week in {}.; What do people eat
in {}?; Where is {}?; Tell me about the history of {}.; Write a postcard from {}.; What is {} known for?; Is {}
expensive?; How do I get to {}?; What should I know before I travel to {}?; What animals live in {}?; Name five
facts about {}.; When is the best time to visit {}?; Write a travel guide to {}.; What language do people speak
in {}?
""")

LANGUAGES_OF_CODE = _listed("""
Python; Python; Python; Python; JavaScript; JavaScript; Java; C; C++; Rust; Go; TypeScript; Ruby; SQL; bash; PHP
""")
PROGRAMS = _listed("""
reverses a list; computes the factorial of a number; finds the largest of three numbers; sorts names by length;
counts the words of a text; reads a file line by line; checks if a number is prime; prints the first Fibonacci
numbers; removes duplicates from a list; converts Celsius to Fahrenheit; finds the average of a list; draws a
random password; merges two sorted lists; counts vowels; sums the digits of a number; validates an email
address; parses a date; implements a stack; implements a queue; implements binary search; multiplies two
matrices; flattens a nested list; writes a dictionary to a file; downloads a web page; asks for a name and
greets; plays rock, paper, scissors; finds the most frequent word; computes the greatest common divisor;
shuffles a deck of cards; prints a triangle of stars; rotates an array; groups words by their first letter;
simulates rolling two dice; tracks expenses; converts a number to binary; computes compound growth; swaps two
variables; finds missing numbers; makes a to-do list; inserts a node into a linked list; traverses a tree;
measures how long a call takes; retries a failed request; capitalizes every word; removes blanks; splits a
sentence into words; finds the second largest number; counts to ten
""")
CODE = _listed("""
Write a {language} function that {task}.; Write a {language} program that {task}.; Show me how to write code
that {task} in {language}.; I need a {language} script that {task}. Please add comments.; How would you test
{language} code that {task}?; Write a {language} class that {task}.; In {language}, what is the shortest code
that {task}?; Explain step by step how a {language} program {task}.; Give me pseudocode for an algorithm that
{task}.
""")
_CODES = """
def f(n):
    return 1 if n < 2 else n * f(n - 1)
---
for i in range(10):
    if i % 2 == 0:
        print(i)
---
const total = prices.reduce((sum, p) => sum + p, 0);
---
SELECT name, COUNT(*) FROM orders GROUP BY name ORDER BY 2 DESC;
---
def mean(values):
    return sum(values) / len(values)
---
while True:
    line = input()
    if not line:
        break
    print(line.upper())
---
int main(void) {
    int a[3] = {1, 2, 3};
    printf("%d", a[3]);
    return 0;
}
---
def add(item, items=[]):
    items.append(item)
    return items
---
let x = "5" + 3;
console.log(x);
---
ls -l | grep txt | wc -l
---
numbers = [3, 1, 2]
print(sorted(numbers)[-1])
---
class Dog:
    def __init__(self, name):
        self.name = name
    def bark(self):
        return self.name + " says woof"
"""
SNIPPETS = tuple(one.strip("\n") for one in _CODES.split("---"))
ABOUT_CODE = _listed("""
What does this code do?; Find the mistake in this code.; Explain this code line by line.; How can I improve this
code?; Add comments to this code.; Rewrite this code so that it is easier to read.; What is the output of this
code?
""")

SUBJECTS = _listed("""
The teacher; My sister; A young engineer; The committee; Our neighbours; The old captain; The company; Two
students; A group of tourists; The mayor; The doctor; Her brother; The museum; A local farmer; The football
team; The scientists; His grandmother; The new manager; A famous singer; The children; The bank; The gardener;
The government; A small cat
""")
VERBS = _listed("""
visited; discussed; repaired; described; bought; forgot; painted; sold; opened; closed; found; lost; presented;
moved; photographed; studied; cleaned; explained; rejected; announced; cancelled; rebuilt; praised; criticised;
postponed
""")
OBJECTS = _listed("""
the new library; an old clock; the annual report; a box of letters; the garden behind the house; a plan for the
summer; the broken window; several paintings; a long article; the train station; a recipe for soup; the first
chapter; the results of the survey; a pair of shoes; the bridge over the river; the meeting; a collection of
stamps; a boat; the price of bread; the school play; an agreement with the union; the harvest; a letter from the
bank; the concert
""")
CIRCUMSTANCES = (
    "", "", " last week", " in the afternoon", " because of the rain", " although nobody had asked",
    " before winter", " with great care", " after a long debate", " in less than an hour", " for the second time",
    " despite the costs", ", which surprised everyone", ", but not everybody agreed", " near the harbour",
    " without saying a word",
)  # fmt: skip

LANGUAGES = _listed("French; German; Spanish; Italian; Portuguese; Latin; Dutch; Swedish; Japanese; Polish")
TRANSLATE = _listed("""
Translate into {language}: {text}; How do you say this in {language}? {text}; Please translate this sentence to
{language} and explain the grammar: {text}; What is the {language} translation of '{text}'?
""")
EDIT = _listed("""
Correct the spelling: {}; Rewrite this in other words: {}; Make this more polite: {}; Shorten this text: {};
Change this to the future tense: {}; Change this into a question: {}; Proofread this: {}; Make this longer: {};
Turn this into a list: {}; Write this as a headline: {}; Continue this text: {}; Rewrite this for a child: {};
Rewrite this as an email: {}; Improve the style: {}; Replace difficult words: {}; Add adjectives: {}
""")
SUMMARISE = _listed("""
Summarize this text in one sentence: {}; What is the main point of this text? {}; Give this text a title: {};
List the people that appear in this text: {}; Write a summary in bullet points: {}; What happened first? {};
Answer with yes or no: is somebody surprised in this text? {}; Extract all verbs: {}; {} What happens next?
""")
CLASSIFY = _listed("""
Is this sentence positive, negative or neutral? {}; Which word is the subject? {}; Find the verb: {}; Is this
sentence in the past or in the present? {}; Which topic does this belong to: politics, sports or family? {}; How
many words has this sentence? {}; Write three questions about this sentence: {}; What is implied here? {}
""")

GOODS = _listed(
    "apples; books; tickets; pencils; bottles of water; chairs; cookies; marbles; stamps; lamps; cups"
)
SUMS = _listed("""
What is {b} plus {a}?; What is {a} times {c}?; What is {b} divided by {c}?; I buy {a} {thing} for {c} dollars
each. How much do I pay?; Anna has {b} {thing} and gives away {a}. How many are left?; What is {c} percent of
{big}?; A train goes {b} kilometres in {c} hours. How fast is it?; Solve {c}x + {a} = {b}.; Is {b} a prime
number?; What is the area of a rectangle of {a} by {c} metres?; List the first {c} multiples of {a}.; How many
minutes are {a} hours?; {a} friends share {big} dollars. How much does each get? Show your work.; What is the
square of {a}?; Round {big} to the nearest hundred.; What is the average of {a}, {b} and {c}?; If {c} {thing}
cost {a} dollars, what do {b} {thing} cost?
""")

ROLES = _listed("""
a chef; a lawyer; a medieval knight; a robot; a talking tree; a tour guide; a strict teacher; a detective; a
wizard; an astronaut; a sports commentator; a news anchor; a philosopher; a salesman; a historian; a scientist;
a comedian; a yoga instructor; a grumpy old man; an alien; a librarian; a poet; a farmer; a judge; a cat; a time
traveller
""")
PLAY = _listed("""
You are {role}. Tell me about {topic}.; Act as {role} and explain {topic}.; Imagine you were {role}. What would
you say about {topic}?; Speak like {role}: what is {topic}?; I want you to be {role}. I begin: what do you know
about {topic}?; Write what {role} would write about {topic}.
""")
COMPARE = _listed("""
Compare {} and {}.; What do {} and {} have in common?; Which is more important, {} or {}?; Write a story about
{} and {}.; What is the difference between {} and {}?; Should I learn about {} or about {}?; How are {} and {}
connected?
""")
SMALL_TALK = _listed("""
Hi!; Hello, how are you?; Good morning; Who are you?; What can you do?; Tell me a joke.; I am bored.; Thanks!; I
had a terrible day.; What is your favourite colour?; Do you sleep?; I think about {}. What do you say?; My hobby
is {}.; Yesterday I failed at {}.; Everybody talks about {} and I do not get it.; Guess what: I like {} now!; Do
you know anything about {}?; Tell me a story about {}.; Give me a fun fact on {}.; Say something nice about {}.;
I am thinking about {} this weekend.; Ask me three questions about {}.; Make me laugh with a joke on {}.
""")
FOLLOW_UPS = _listed("""
Can you explain that in more detail?; Make it shorter.; Why?; Give me an example.; Are you sure?; Thank you!
What else should I know?; Can you say that in simpler words?; What is the most important part?; Continue.; And
then?; Rewrite your answer as a list.; I do not agree.; How do you know that?; What would be the opposite?;
Translate your answer into Spanish.; Summarize your answer in one sentence.; Can you give me three more?; That
is not what I meant.; Add a conclusion.; Write it again, but funnier.; What are the risks?; Who told you that?;
Ask me something.
""")
SYSTEMS = _listed("""
You are a helpful assistant.; You are a concise assistant. Answer in one or two sentences.; You are a patient
teacher.; You answer only in bullet points.; You are an expert programmer.; You are a friendly chatbot of a
travel agency.; Answer truthfully. If you do not know, say so.; You are a writing coach.; You are a customer
service agent of an online shop.; Always answer in rhyme.; You are a helpful assistant that explains its
reasoning step by step.; You are a medical information assistant. Recommend seeing a doctor.; Respond in a
formal tone.; You are a poet.
""")

TOPICS = _listed("""
cooking rice; the solar system; public speaking; electric cars; photosynthesis; football; painting; the Roman
Empire; saving money; learning a language; machine learning; sleep; recycling; tea; airports; elephants; the
water cycle; job interviews; computer viruses; hiking; libraries; bees; the internet; farming; glass; vaccines;
friendship; earthquakes; novels; time management; kitchens; wind power; the human heart; city planning; rivers;
photography; cheese; swimming; the stock market; desert animals; Germany; Egypt; Canada; India; Mexico; the sun;
the planet Mars; electricity; magnets; light; summer; snow; storms; forests; lakes; islands; cats; horses;
birds; butterflies; sharks; dinosaurs; trees; flowers; oranges; potatoes; chocolate; soup; pizza; milk; salt;
cars; airplanes; ships; buses; roads; castles; museums; schools; hospitals; markets; newspapers; television;
telephones; computers; video games; movies; dancing; the guitar; the piano; singing; drawing; poetry; writing a
diary; mathematics; chemistry; history; geography; medicine; law; money; banks; taxes; elections; democracy; the
family; birthdays; holidays; travel; camping; running; tennis; yoga; healthy food; breakfast; cooking for
friends; houses; furniture; clothes; shoes; gold; paper; plastic; wood; stars; black holes; satellites; the
atom; evolution; the brain; memory; dreams; happiness; anger; gravity; climate change; inflation; artificial
intelligence; the French Revolution; the First World War; slavery; the Industrial Revolution; ancient Egypt; the
Middle Ages; the Renaissance; colonialism; the Cold War; human rights; feminism; capitalism; socialism;
globalisation; immigration; poverty; education; homework; bullying; social media; privacy; cybersecurity;
blockchain; cloud computing; databases; algorithms; open source software; the Linux kernel; programming; neural
networks; robots; drones; self-driving cars; space travel; the Big Bang; quantum mechanics; relativity;
thermodynamics; entropy; DNA; genes; bacteria; antibiotics; the immune system; cancer; diabetes; high blood
pressure; allergies; headaches; vitamins; protein; sugar; caffeine; alcohol; exercise; stress; anxiety;
depression; therapy; meditation; mindfulness; confidence; procrastination; creativity; leadership; teamwork;
communication; negotiation; marketing; advertising; accounting; insurance; mortgages; credit cards; retirement;
investing; real estate; supply and demand; trade; tourism; hotels; restaurants; fashion; jewellery; perfume;
tattoos; architecture; sculpture; opera; jazz; rock music; hip hop; theatre; comedy; magic tricks; chess;
basketball; baseball; the Olympic Games; cycling; skiing; gymnastics; boxing; martial arts; golf; sailing;
diving; mountains; volcanoes; oceans; coral reefs; rainforests; deserts; glaciers; rivers that dry up;
hurricanes; tornadoes; floods; droughts; wildfires; the seasons; rainbows; lightning; clouds; the moon; comets;
tides; whales; dolphins; octopuses; penguins; wolves; bears; lions; snakes; frogs; spiders; ants; dogs; rabbits;
cows; chickens; owls; eagles; mosquitoes; mushrooms; grass; roses; cactuses; apples; bananas; tomatoes; garlic;
bread; pasta; eggs; butter; honey; wine; beer; coffee; spices; barbecue; breakfast cereals; ice cream; cakes;
vegetarian food; fast food; kitchens in small flats; gardening; composting; solar panels; nuclear power; coal;
oil; batteries; engines; trains; subways; bicycles; bridges; tunnels; skyscrapers; elevators; clocks; calendars;
mirrors; windows; candles; soap; keys; maps; flags; coins; stamps; toys; dolls; kites; puzzles; board games;
card games; fairy tales; myths; superheroes; science fiction; ghost stories; detective novels; biographies;
grammar; spelling; handwriting; dictionaries; translation; sign language; accents; proverbs; humour; small talk;
manners; weddings; funerals; religion; Buddhism; Islam; Christianity; philosophy; ethics; free will; justice;
prisons; the police; courts; contracts; patents; copyright; journalism; fake news; propaganda; statistics;
probability; geometry; calculus; prime numbers; fractions; algebra; logic; paradoxes; optical illusions;
colours; sound; heat; pressure; friction; acids; metals; diamonds; oxygen; carbon; water; air pollution; noise;
waste; endangered species; zoos; veterinarians; nurses; firefighters; pilots; teachers; farmers; engineers;
lawyers; actors; babies; teenagers; old age; grandparents; siblings; marriage; divorce; parenting; loneliness;
love; jealousy; forgiveness; courage; patience; honesty; luck; success; failure; habits; goals; decision making;
critical thinking; curiosity; remote work; commuting; unemployment; labour unions; minimum wage;
entrepreneurship; startups; project management; customer service; spreadsheets; email; smartphones; cameras;
headphones; printers; web design; JavaScript; Python; SQL; version control; unit tests; recursion; linked lists;
sorting; encryption; passwords; the printing press; the telegraph; penicillin; the wheel; the compass; the
Vikings; the samurai; the Aztecs; the Silk Road; the Black Death; pirates
""")
