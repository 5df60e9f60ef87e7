-- What belongs to a message beside what it says: an author's name, and what a model told along with its answer.
alter table messages add column extra json;
