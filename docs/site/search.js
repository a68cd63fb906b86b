// Sphinx's scores, with pages of docs/ before changelog, benchmarks and other pages that mention everything.
var Scorer = {
  score: ([page, title, anchor, description, score]) => score - (page.startsWith("docs/") ? 0 : 10),
  objNameMatch: 11, objPartialMatch: 6, objPrio: {}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
